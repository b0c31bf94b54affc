"""CTranslate2's beam search, as a worker: ``python ctranslate2_worker.py MODEL --threads N``.

Float32. The prompt is run at once (``include_prompt_in_result=False``), all but its last token, and once per prompt,
not once per beam. Its static prompt is not used: cached, it would leave the prompt out of every round but the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import ctranslate2
from answering import serve


class CTranslate2:
    """A loaded model.

    Args:
        path: folder of the converted model.
        threads: of the matrix products.
    """

    def __init__(self, path: str, threads: int) -> None:
        self.versions = {"ctranslate2": ctranslate2.__version__}
        self._generator = ctranslate2.Generator(
            path, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )

    def prepare(self, asked: dict[str, Any]) -> Callable[[], Any]:
        prompts = [[f"t{token}" for token in prompt] for prompt in asked["prompts"]]  # names: see environments.py

        def search() -> Any:
            return self._generator.generate_batch(
                prompts,
                beam_size=asked["beams"],
                max_length=asked["new_tokens"],
                length_penalty=1.0,
                include_prompt_in_result=False,
                end_token=[],  # no token ends a sequence, so that each has all its new tokens
            )

        return search

    def sequences(self, found: Any) -> list[list[int]]:
        return [result.sequences_ids[0] for result in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: CTranslate2(arguments.model, arguments.threads))
