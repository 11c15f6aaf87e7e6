"""Known vulnerabilities of the pinned packages: `make audit`. Needs pip-audit and an index that answers; where either is missing it
says so and ends well, since that is no fault of the packages. pip-audit alone says "none found" also where it could ask nobody."""

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
SECONDS = 60


def main() -> None:
    if importlib.util.find_spec("pip_audit") is None:
        print('audit: not done, pip-audit is not installed ("pip install pip-audit").')
        return
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "5", "--format", "json"]
    words = [sys.executable, "-m", "pip_audit", *options, "-r", str(CONSTRAINTS)]
    packages: list[dict[str, Any]] = []
    with suppress(ValueError, subprocess.TimeoutExpired):
        packages = json.loads(subprocess.run(words, capture_output=True, timeout=SECONDS).stdout)["dependencies"]
    asked = [package for package in packages if "skip_reason" not in package]
    if not asked:
        print("audit: not done, the index does not answer.")
        return
    bad = [(package, hole) for package in asked for hole in package["vulns"]]
    for package, hole in bad:
        fixed = ", ".join(hole["fix_versions"]) or "no version"
        print(f"audit: {package['name']} {package['version']}: {hole['id']}, fixed in {fixed}")
    print(
        f"audit: {len(bad)} known vulnerabilities in {len(asked)} packages; {len(packages) - len(asked)} are not known to the index."
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
