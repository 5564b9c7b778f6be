#!/usr/bin/env python3
"""Lints the Containerfiles, and asks whether the images hold what the programs load.

usage: containerfiles_test.py ROOT BIN_DIR

The shared libraries of the programs built here (Debian 12, as in the images) must belong to the packages that the last
stage installs, or to what these depend on.
"""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT, BIN_DIR = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
HADOLINT = pathlib.Path(sys.executable).parent / "hadolint"
FILES = ["deploy/Containerfile", "deploy/Containerfile.cuda"]
PROGRAMS = ["ferry", "ferry-router", "ferry-prefill", "ferry-decode"]


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def owners_of(paths):
    """{path: the package that has it}; dpkg may know a file by its name before /lib became a link to /usr/lib."""
    names = [name for path in paths for name in (path, path.removeprefix("/usr"))]
    said = subprocess.run(["dpkg", "-S", *names], capture_output=True, text=True).stdout
    owners = dict(reversed(line.split(": ", 1)) for line in said.splitlines())
    return {path: owners.get(path, owners.get(path.removeprefix("/usr"), "nobody")).split(":")[0] for path in paths}


def installed_by(text):
    """The packages of the last stage's apt-get install."""
    last = text[text.rindex("\nFROM ") + 1:].replace("\\\n", " ")
    [install] = re.findall(r"apt-get install -y --no-install-recommends([^&]*)&&", last)
    return set(install.split())


def with_dependencies(packages):
    said = output("dpkg-query", "-W", "-f=${Package}\t${Pre-Depends},${Depends}\n")
    depends = dict(line.split("\t") for line in said.splitlines())
    found, todo = set(), list(packages)
    while todo:
        package = todo.pop()
        if package in found:
            continue
        found.add(package)
        todo += [re.split(r"[\s:(|]", one.strip())[0] for one in depends.get(package, "").split(",") if one.strip()]
    return found


class Containerfiles(unittest.TestCase):
    def test_hadolint_has_nothing_to_say(self):
        done = subprocess.run([HADOLINT, "-c", ROOT / "deploy/hadolint.yaml", *[ROOT / file for file in FILES]], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_every_library_is_in_the_image(self):
        libraries = set()
        for program in PROGRAMS:
            for line in output("ldd", BIN_DIR / program).splitlines():
                if "=> /" in line:
                    libraries.add(str(pathlib.Path(line.split()[2]).resolve()))
        self.assertGreater(len(libraries), 20)
        owners = owners_of(sorted(libraries))
        for file in FILES:
            packages = with_dependencies(installed_by((ROOT / file).read_text()))
            for library, owner in sorted(owners.items()):
                self.assertIn(owner, packages, f"{file}: {library}")

    def test_every_program_is_copied(self):
        for file in FILES:
            text = (ROOT / file).read_text()
            for program in PROGRAMS:
                self.assertRegex(text, rf"COPY --from=build [^#]*bin/{program}[ \n]")
            for path in re.findall(r"^COPY ((?!--)[^\s]+) ", text, re.MULTILINE):
                self.assertTrue((ROOT / path).exists(), f"{file}: {path}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
