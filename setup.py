"""Packaging of dmltrain. Ranges are here, the exact versions that the project is tested with in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "dmltrain/__init__.py").read_text(), re.MULTILINE).group(1)
MXNET_NEEDS = ["numpy<2", "graphviz<0.9", "requests>=2.20"]  # MXNet 1.9.1's wheel asks for numpy<2 in effect only

setup(
    name="dmltrain",
    version=VERSION,
    description="Distributed parameter-server training of PyTorch and MXNet models over ordinary networks",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["dmltrain*", "launch*"]),
    package_data={"dmltrain.data": ["digits.csv.gz", "digits.LICENSE.txt"]},
    install_requires=["cryptography>=41", "numpy>=1.24", "paramiko>=3.4", "pathspec>=1.0", "psutil>=5.9", "pyyaml>=6.0",
                      "rich>=13.0"],
    extras_require={
        "torch": ["torch>=2.4"],
        "mxnet": ['mxnet==1.9.1; python_version < "3.12"', *MXNET_NEEDS],
        "mxnet-cu112": ['mxnet-cu112==1.9.1; python_version < "3.12"', *MXNET_NEEDS],
        "plot": ["matplotlib>=3.7"],
        "dev": ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.6", "matplotlib>=3.7"],
    },
    entry_points={"console_scripts": ["dmltrain-launch = launch.cli:main",
                                      "dmltrain-parse = dmltrain.report.cli:main"]},
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
