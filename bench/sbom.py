"""Every installed package as CycloneDX JSON, on standard output: `make sbom`."""

import json
from importlib.metadata import distributions


def components() -> list[dict[str, object]]:
    found = {}
    for package in distributions():
        name, licence = package.metadata["Name"], package.metadata["License-Expression"] or package.metadata["License"]
        entry = {
            "type": "library",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
        }
        named = {"licenses": [{"license": {"name": licence.splitlines()[0][:80]}}]} if licence else {}
        found[name.lower()] = entry | named
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    print(
        json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components()}, indent=1)
    )
