"""Mobile export toolchain for EpiCache (arXiv:2509.17396): from a language model to a bundle for phones."""

__version__ = "0.1.0"
