"""Ours and transformers' own beam search against the engines that people would use instead.

    python -m benchmarks.peers --build DIR            # an environment for each peer, and the models converted
    python -m benchmarks.peers --environments DIR     # the table
    python -m benchmarks.peers --environments DIR --record

In the order of use: `environments` (what is installed and converted, and where), `processes` (one process for each
engine, which waits for a line and answers with one), `table` (rounds, ratios, the printed table), `__main__` (the
command). `answering` and the files `*_worker.py` run in those processes; the peers' ones import nothing but their
engine and `answering`, which lies beside them.
"""
