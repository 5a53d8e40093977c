"""Packaging of fedcodist. Lower bounds are the oldest versions that the tests were run with."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "digits": ["scikit-learn>=1.5"],
    "haiku": ["dm-haiku>=0.0.14"],
    "tfds": ["tensorflow-datasets>=4.9.6"],
    "plot": ["matplotlib>=3.9"],
    "tensorboard": ["tensorboardX>=2.6.2"],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
EXTRAS["dev"] = [
    *EXTRAS["all"],
    "hypothesis>=6.100",
    "mypy>=1.11",
    "pytest>=8.2",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
]

setup(
    name="fedcodist",
    version="0.1.0",
    description="Federated learning of heterogeneous models by knowledge distillation, in JAX",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["fedcodist", "fedcodist.*"]),
    package_data={"fedcodist": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "chex>=0.1.89",
        "flax>=0.10.4",
        "jax>=0.7.0",
        "ml-collections>=1.0",
        "numpy>=1.26",
        "optax>=0.2.5",
        "rich>=13.7",
        "safetensors>=0.4.3",
    ],
    extras_require=EXTRAS,
)
