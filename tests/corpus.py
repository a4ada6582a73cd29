"""Text for a run of a few steps."""

import json
import pathlib


def write_corpus(folder: pathlib.Path) -> str:
    """Makes `folder` with sixty short documents; returns what data.source takes."""
    folder.mkdir()
    texts = [f'document {i}: ' + 'abc ' * (i % 7 + 1) for i in range(60)]
    rows = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    (folder / 'a.jsonl').write_text(rows)
    return str(folder)
