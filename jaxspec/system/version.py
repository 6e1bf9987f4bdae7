"""Name and version of the distribution."""

import tomllib
from importlib import metadata
from pathlib import Path

from jaxspec.inputs.checked import ConfigError

DISTRIBUTION = "jaxspec-rl"
NAMESAKE = "jaxspec"
"""A library for X-ray spectra on PyPI, imported under the same name."""
_PACKAGE = Path(__file__).resolve().parent.parent


def package_version() -> str:
    """Returns the version of the installed distribution.

    In a checkout that is not installed, it is read from pyproject.toml. Without that file it is
    "unknown".
    """
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        project = _PACKAGE.parent / "pyproject.toml"
        return (
            tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
            if project.is_file()
            else "unknown"
        )


def refuse_namesake() -> None:
    """Refuses a namesake installed over this package.

    Raises:
      ConfigError: the library for X-ray spectra is installed in the same folder.
    """
    try:
        folder = metadata.distribution(NAMESAKE).locate_file(NAMESAKE)
    except metadata.PackageNotFoundError:
        return
    # A namesake elsewhere is not imported: this package was found first.
    if Path(str(folder)).resolve() == _PACKAGE:
        raise ConfigError(
            f"the distribution {NAMESAKE} (a library for X-ray spectra) is installed over"
            f" {DISTRIBUTION} in {_PACKAGE}; both are imported as jaxspec: pip uninstall {NAMESAKE}"
            f" {DISTRIBUTION}, and give each an environment of its own"
        )
