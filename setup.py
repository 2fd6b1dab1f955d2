"""Finds the packages of the wheel; everything else about it is in pyproject.toml.

The root of the repository is itself the package `headgate`, and setuptools has no setting that finds the
packages below such a root.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOMS = ("api", "connectors", "k8s", "operators", "runtime", "spark", "state", "testing")


class BuildWithoutSetup(build_py):
    """This file lies in the package, and is no part of it."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [each for each in found if each[:2] != ("headgate", "setup")]


packages = find_packages(".", include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
setup(
    packages=["headgate", *(f"headgate.{name}" for name in sorted(packages))],
    cmdclass={"build_py": BuildWithoutSetup},
)
