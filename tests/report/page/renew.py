"""Fetch a version of the drawing library from npm: python -m tests.report.page.renew 6.1.0

npm checks the package against the registry's digest. library.json records version, digest and the SHA-256 of each file,
which the tests compare. Needs npm; nothing else of this project does.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[3] / "dmltrain/report/page/vendor"
FILES = {  # package -> file of it -> name here
    "echarts": {
        "package/dist/echarts.common.min.js": "echarts.common.min.js",
        "package/LICENSE": "echarts.LICENSE.txt",
        "package/NOTICE": "echarts.NOTICE.txt",
        "package/licenses/LICENSE-d3": "d3.LICENSE.txt",
    },
    "zrender": {"package/LICENSE": "zrender.LICENSE.txt"},  # the same version number as echarts; part of its file
}


def main(version: str) -> None:
    packages = {name: _fetch(f"{name}@{version}", files) for name, files in FILES.items()}
    digests = {
        name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest()
        for files in FILES.values()
        for name in files.values()
    }
    record = {"name": "Apache ECharts", "version": version, "npm": packages, "sha256": digests}
    (VENDOR / "library.json").write_text(json.dumps(record, indent=2) + "\n")


def _fetch(package: str, files: dict[str, str]) -> str:
    """Unpack `files` of an npm package; returns the digest that the registry has of it."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["npm", "pack", "--json", package], cwd=folder, capture_output=True, check=True)
        [record] = json.loads(packed.stdout)
        with tarfile.open(Path(folder, record["filename"])) as archive:
            for member, name in files.items():
                content = archive.extractfile(member)
                assert content is not None, f"{package} has no file {member}"
                (VENDOR / name).write_bytes(content.read())
    return str(record["integrity"])


if __name__ == "__main__":
    main(sys.argv[1])
