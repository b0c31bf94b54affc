"""Entry for ``model.generate(..., custom_generate="<path or hub repository>", trust_remote_code=True)``.

transformers copies this one file elsewhere before it runs it, so that the package itself must be importable.
"""


def generate(model, *args, **kwargs):
    """Beam search over a paged cache; arguments and results of ``model.generate``."""
    try:
        from hf_paged_beam import generate as paged_generate
    except ImportError as error:
        raise ImportError(
            "custom_generate found hf_paged_beam's generate.py, but the package hf_paged_beam cannot be imported. "
            "Install it (pip install hf-paged-beam, or pip install -e . in a checkout), or put the folder that "
            "contains hf_paged_beam/ on sys.path."
        ) from error
    return paged_generate(model, *args, **kwargs)
