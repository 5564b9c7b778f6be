"""Generates ferry/v1 from proto/ferry/v1 of the tree (or of the source package) into what is built, not into the tree."""
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
FILES = ("ferry/v1/inference.proto", "ferry/v1/error.proto")


def proto_root() -> pathlib.Path:
    for root in (HERE / "proto", HERE.parent.parent / "proto"):
        if all((root / name).is_file() for name in FILES):
            return root
    raise FileNotFoundError(f"no proto/{FILES[0]}: build the package from within the Ferry tree")


class BuildWithStubs(build_py):
    def run(self) -> None:
        import grpc_tools
        from grpc_tools import protoc

        super().run()
        root, known = proto_root(), pathlib.Path(grpc_tools.__file__).parent / "_proto"
        out = [f"--{kind}_out={self.build_lib}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        if protoc.main(["protoc", f"-I{root}", f"-I{known}", *out, *FILES]) != 0:
            raise RuntimeError("protoc failed: what it says stands above")


class SdistWithProto(sdist):
    def make_release_tree(self, base_dir: str, files: list) -> None:
        super().make_release_tree(base_dir, files)
        for name in FILES:
            target = pathlib.Path(base_dir, "proto", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(proto_root() / name, target)


setup(cmdclass={"build_py": BuildWithStubs, "sdist": SdistWithProto})
