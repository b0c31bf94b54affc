"""transformers' own beam search, ours, and ours with its switches, as one worker.

``python -m benchmarks.peers.transformers_worker MODEL --shape 30m --threads N``, in the environment of the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import hf_paged_beam

from ..models import random_llama
from .answering import serve

SWITCHES = ("compile", "prepack")


def known_switches() -> dict[str, bool]:
    """Keywords of the variant "switches"; empty where the installed package does not know them all."""
    known = set(SWITCHES) <= set(hf_paged_beam.Options.__dataclass_fields__)
    return dict.fromkeys(SWITCHES, True) if known else {}


ENGINES: dict[str, dict[str, Any]] = {
    "stock": {},
    "plain": {"custom_generate": "hf_paged_beam"},
    "switches": {"custom_generate": "hf_paged_beam", **known_switches()},
}
"""Keywords that each adds to the call."""


class Transformers:
    """A model of a benchmark's shape, with the weights that the peers' models were converted from.

    Built as the other benchmarks build it and then filled: tensors that stay mapped from a file may be slower to read.

    Args:
        path: folder of the saved model.
        shape: its name among the benchmarks' shapes.
        threads: torch's.
    """

    def __init__(self, path: Path, shape: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._model = random_llama(shape)
        self._model.load_state_dict(load_file(path / "model.safetensors"))

    def prepare(self, asked: dict[str, Any]) -> Callable[[], Any]:
        prompts = torch.tensor(asked["prompts"])  # [B, P]
        call = {"num_beams": asked["beams"], "max_new_tokens": asked["new_tokens"], "do_sample": False}
        call |= ENGINES[asked["engine"]]

        def search() -> Any:
            found = self._model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **call)
            return found[:, prompts.shape[1] :]  # [B, T]

        return search

    def sequences(self, found: Any) -> list[list[int]]:
        return found.tolist()  # host read: the search is over


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: Transformers(arguments.model, arguments.shape, arguments.threads))
