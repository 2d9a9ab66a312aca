"""Compiles every CUDA kernel with NVRTC, for every architecture that is promised; needs no card.

usage: compile.py [--work DIR]

NVRTC comes from its Python packages, which pip fetches into DIR: 12.0, whose PTX every driver of CUDA 12 and
later loads, and the newest 12, which knows sm_120. Ends with 0 when all compile, with 77 when a package cannot
be had.
"""
import argparse
import ctypes
import glob
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "crates/compute/src/cuda/kernels"
EVERYWHERE = ["compute_80", "sm_80", "sm_86", "sm_89", "sm_90"]
VERSIONS = {"12.0.140": EVERYWHERE, "12.9.86": [*EVERYWHERE, "sm_120"]}


def library(version, work):
    """The library of a version, fetched if it is not there."""
    place = work / version
    if not place.exists():
        package = f"nvidia-cuda-nvrtc-cu12=={version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), package]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"{package} cannot be had: skipped")
            sys.exit(77)
        with zipfile.ZipFile(glob.glob(str(work / f"*-{version}-*.whl"))[0]) as wheel:
            wheel.extractall(place)
    # It looks its built-in functions up where the loader already has them.
    for name in ["libnvrtc-builtins.so*", "libnvrtc.so.12"]:
        (found,) = glob.glob(str(place / "nvidia/cuda_nvrtc/lib" / name))
        loaded = ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
    return loaded


class Compiler:
    """One version of NVRTC."""

    def __init__(self, library):
        self.nvrtc = library

    def call(self, name, *arguments):
        return getattr(self.nvrtc, "nvrtc" + name)(*arguments)

    def text(self, program, name):
        """A result that comes with its size."""
        size = ctypes.c_size_t()
        assert self.call(f"Get{name}Size", program, ctypes.byref(size)) == 0, name
        text = ctypes.create_string_buffer(size.value)
        assert self.call(f"Get{name}", program, text) == 0, name
        return text.raw

    def compile(self, source, architecture):
        """PTX or machine code of a file; exits with the compiler's words if it does not compile."""
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * 1)(b"target.h")
        headers = (ctypes.c_char_p * 1)((KERNELS / "target.h").read_bytes())
        made = self.call("CreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 1, headers, names)
        assert made == 0, made
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        result = self.call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        if result != 0:
            sys.exit(f"{source.name} for {architecture}:\n{self.text(program, 'ProgramLog').decode()}")
        return self.text(program, "PTX" if architecture.startswith("compute") else "CUBIN")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", metavar="DIR", type=pathlib.Path, help="where packages go and stay (default: nowhere)")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = a.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for version, architectures in VERSIONS.items():
            compiler = Compiler(library(version, work))
            for source in sorted(KERNELS.glob("*.cu")):
                for architecture in architectures:
                    start = time.monotonic()
                    code = compiler.compile(source, architecture)
                    seconds = time.monotonic() - start
                    print(f"NVRTC {version}: {source.name} for {architecture}, {len(code)} bytes, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
