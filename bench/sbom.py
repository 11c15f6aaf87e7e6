"""Every installed package as CycloneDX 1.5 JSON, on standard output: `make sbom`."""

import json
import re
from importlib.metadata import Distribution, distributions


def component(package: Distribution) -> dict[str, object]:
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()  # as package URLs spell it
    address = f"pkg:pypi/{name}@{package.version}"
    entry = {"type": "library", "bom-ref": address, "name": name, "version": package.version, "purl": address}
    return entry | licence(package)


def licence(package: Distribution) -> dict[str, object]:
    """An SPDX expression where the package has one; else what it calls its licence."""
    words = package.metadata.get_all("License-Expression")
    if words:
        return {"licenses": [{"expression": words[0]}]}
    classifiers = [
        line.split(" :: ")[-1] for line in package.metadata.get_all("Classifier") or [] if "License ::" in line
    ]
    names = classifiers or [
        text.splitlines()[0][:80] for text in package.metadata.get_all("License") or [] if text.strip()
    ]
    return {"licenses": [{"license": {"name": name}} for name in names]} if names else {}


def bill() -> dict[str, object]:
    ours, others = {}, {}
    for package in distributions():
        entry = component(package)
        (ours if entry["name"] == "electra" else others)[entry["name"]] = entry
    parts = [others[name] for name in sorted(others)]
    subject = ours["electra"] | {"type": "application"}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}
    return head | {"metadata": {"component": subject}, "components": parts}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))
