"""Prints what a project depends on, with the extras that are named, so that it can be installed before its source is there."""

import sys
import tomllib

path, *extras = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [one for extra in extras for one in project["optional-dependencies"][extra]]
print(*project["dependencies"], *wanted, sep="\n")
