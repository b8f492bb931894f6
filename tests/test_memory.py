"""Memory that stays with the process: in a new one, since the setting lasts as long as it does."""

import os
import platform
import subprocess
import sys

import pytest

from keras_aiayn import memory

# The module by its file: no import of the package, whose own arrays would count.
PROBE = """
import resource, runpy, sys
print(runpy.run_path(sys.argv[1])["keep_freed_memory"]())
size = 256 * 2**20
bytearray(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")


def probe(**settings):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE, memory.__file__],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    done, faults = answer.stdout.split()
    return done == "True", int(faults)


@GLIBC
@pytest.mark.backend_free
def test_freed_memory_is_used_again_without_a_page_fault():
    done, faults = probe()
    assert done
    assert faults < 100  # of the 65,536 pages that each array fills


@GLIBC
@pytest.mark.backend_free
def test_settings_of_the_user_stay_as_they_are():
    done, faults = probe(MALLOC_MMAP_THRESHOLD_="65536")
    assert not done
    assert faults > 60_000
