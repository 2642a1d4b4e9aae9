"How tests run a notebook."

from __future__ import annotations
import sys, time

from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

LIMIT = 280  # seconds for a notebook, whatever else the machine does


class ThisPython(AsyncKernelManager):
    "A kernel that runs the Python of these tests, whatever kernels are installed for this user."

    @property
    def kernel_spec(self):
        return KernelSpec(
            argv=[sys.executable, '-m', 'ipykernel_launcher', '-f', '{connection_file}'], language='python'
        )


def client_for(nb, folder):
    end = time.monotonic() + LIMIT  # for all cells together
    return NotebookClient(
        nb,
        kernel_manager_class=ThisPython,
        timeout_func=lambda cell: max(1, int(end - time.monotonic())),
        resources={'metadata': {'path': str(folder)}},
    )
