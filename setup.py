"""What pyproject.toml leaves to code: versions, packages, and the README with absolute links.

Lower bounds are the oldest versions that the tests were run with.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

REPOSITORY = "https://github.com/fedcodist/fedcodist"

EXTRAS = {
    "digits": ["scikit-learn>=1.6.1"],
    "graph": ["networkx>=3.6.1"],
    "haiku": ["dm-haiku>=0.0.16"],
    "hf": ["datasets>=3.6.0"],
    # TFDS itself forgets to ask for importlib-resources, which it needs to prepare a data set.
    "tfds": ["importlib-resources>=6.5.2", "tensorflow-datasets>=4.9.10"],
    "plot": ["matplotlib>=3.10"],
    "privacy": ["dp-accounting>=0.6.0", "jax-privacy>=2.0.0"],
    "secure": ["cryptography>=40.0", "pycryptodomex>=3.10.1"],
    "tensorboard": ["tensorboardX>=2.6.2.2"],
    "text": ["tokenizers>=0.21.0"],
    "tune": ["optuna>=4.0"],
}
SERVICES = {"mlflow": ["mlflow-skinny>=3.0"], "wandb": ["wandb>=0.20.1"]}  # with many packages each
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
EXTRAS["docs"] = ["latex2mathml>=3.81.1", "mkdocs-material>=9.8.2", "mkdocstrings[python]>=1.0.8"]
EXTRAS |= SERVICES
EXTRAS["dev"] = [
    *EXTRAS["all"],
    *EXTRAS["mlflow"],
    *EXTRAS["wandb"],
    "hypothesis>=6.100",
    "ipykernel>=6.29.5",
    "mypy>=1.11",
    "nbclient>=0.10.1",
    "nbformat>=5.10.4",
    "pytest>=8.2",
    "pytest-xdist>=3.6.1",
    "ruff>=0.6",
]


def absolute_links(text: str) -> str:
    """Markdown whose links and images into this repository can be followed from any page."""
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:|#)", rf"![\1]({REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)", rf"[\1]({REPOSITORY}/blob/main/", text)


setup(
    version="0.1.0",
    long_description=absolute_links(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["fedcodist", "fedcodist.*"]),
    package_data={"fedcodist": ["py.typed", "*.pyi"]},
    install_requires=[
        "absl-py>=2.3.1",
        "chex>=0.1.91",
        "flax>=0.12.2",
        "jax>=0.9.0",
        "ml-collections>=1.0",
        "msgpack>=1.1.0",
        "numpy>=2.1.3",
        "optax>=0.2.8",
        "protobuf>=6.31.1",
        "rich>=13.9.4",
        "safetensors>=0.7.0",
    ],
    extras_require=EXTRAS,
)
