"""Which environment variables reach Ray and its workers: an allow-list, so that secrets stay in the driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nemo_rl_like.spec.secret_names import is_secret

_ALLOWED_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "HOSTNAME"),
        *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    )
)
_ALLOWED_PREFIXES = (
    *("LC_", "XDG_", "NRL_", "RAY_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "NVSHMEM_", "NVTE_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_"),
    *("VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
_PROXY = re.compile(r"_proxy$", re.IGNORECASE)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Read once, when numpy or torch is imported: they must be set before the worker starts."""


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that may reach Ray and its workers; proxies with a password in them stay out."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES))
        and not is_secret(name)
        and not (_PROXY.search(name) and "@" in value)
    }


@contextmanager
def replaced_environ(values: Mapping[str, str]) -> Iterator[None]:
    """Make `values` this process's whole environment for a while; children started meanwhile inherit it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def worker_variables(run_id_name: str, run_id: str, threads: int) -> dict[str, str]:
    """What a worker's process starts with beside the node's own environment; nothing secret."""
    return {run_id_name: run_id, "PYTHONUNBUFFERED": "1", **{name: str(threads) for name in THREAD_VARIABLES}}
