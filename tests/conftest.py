"""Every test on the CPU backend, with compiled programs kept between runs."""

import gc
import os
import pathlib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
# A Linux process has at most 65,530 mappings, every compiled program takes some, and what is
# compiled past them crashes.
MAPPINGS = pathlib.Path('/proc/self/maps')
MOST_MAPPINGS = 20_000


def pytest_configure(config) -> None:
    jax.config.update('jax_num_cpu_devices', 8)  # meshes; what has none runs on the first
    jax.config.update('jax_compilation_cache_dir', str(ROOT / '.jax_cache'))
    # Most of the tests' time is compilation, and this takes a fifth of it away.
    jax.config.update('jax_disable_most_optimizations', True)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
    # A cache entry that another worker is just writing: the program is compiled again.
    config.addinivalue_line(
        'filterwarnings', 'ignore:Error reading persistent compilation cache entry'
    )


@pytest.fixture(scope='module', autouse=True)
def few_programs():
    """Forgets what is compiled where it has become much; the next file compiles its own."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b'\n') > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
