"""Versions of packages, by their names."""

from dtrain.config.installed import python, version


def test_a_package_has_a_version_and_a_plain_folder_has_none() -> None:
    assert version("pyyaml")[0].isdecimal()
    assert version("no_such_package") == "" == version("")


def test_python_has_the_version_that_a_requirement_compares() -> None:
    assert python().count(".") == 2 and python()[0] == "3"
