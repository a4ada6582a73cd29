"""The notebook runs from top to bottom, and is stored without output."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / 'colab').glob('*.ipynb'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_output(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get('outputs')
        assert cell.get('execution_count') is None


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.setenv('K3JAX_NOTEBOOK_STEPS', '3')
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={'metadata': {'path': path.parent}})
    client.execute()
    texts = [
        out.text for cell in notebook.cells for out in cell.get('outputs', []) if 'text' in out
    ]
    assert any('largest difference' in text for text in texts)
