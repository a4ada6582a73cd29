"""The page and the sweep: one self-contained file, always called an estimate."""

import html.parser
import json
import types

import pytest

from k3jax.aot import sweep
from k3jax.aot.page import page
from tests.aot.estimate_test import report


class Checker(html.parser.HTMLParser):
    """Every tag closed in turn; collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ('src', 'href')]
        if tag not in ('meta', 'br'):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ('src', 'href')]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert not [link for link in checker.links if not link.startswith('#')]
    return ' '.join(checker.text)


def test_a_page_shows_a_report_with_its_plots():
    text = page('train of <c.py>', report())
    shown = checked(text)
    assert text.count('<svg') == 4
    assert 'train of <c.py> (estimate, not measured)' in shown
    assert 'MFU (estimate)' in shown and 'all-reduce' in shown and 'unknown' in shown


def test_a_page_of_what_does_not_fit_shows_memory_only():
    text = page('x', report(None, 'out of memory: needs 2.00 GiB'))
    assert text.count('<svg') == 1
    assert 'out of memory' in checked(text) and 'MFU' not in text


ROWS = [
    {'settings': ['mesh.data=4'], 'error': 'error: mesh: got 4'},
    report() | {'settings': ['mesh.data=2'], 'tokens_per_second': 5.0},
    report() | {'settings': ['mesh.data=1'], 'tokens_per_second': 9.0},
]


def test_a_sweep_is_ranked_by_time_a_token():
    ranked = sweep.ranked(ROWS)
    assert [row['settings'] for row in ranked] == [
        ['mesh.data=1'],
        ['mesh.data=2'],
        ['mesh.data=4'],
    ]
    assert 'estimate' in sweep.line(ranked[0]) and sweep.line(ranked[2]).endswith('mesh: got 4')
    assert 'mesh: got 4' in checked(page('sweep', None, ranked))
    assert 'Nothing fits' in checked(page('sweep', None, ROWS[:1]))


def test_a_sweep_is_every_combination():
    assert sweep.points('mesh=4x2,8x1x1;data.batch_size=16, 32') == [
        ('mesh.data=4', 'mesh.expert=2', 'data.batch_size=16'),
        ('mesh.data=4', 'mesh.expert=2', 'data.batch_size=32'),
        ('mesh.data=8', 'mesh.expert=1', 'mesh.sequence=1', 'data.batch_size=16'),
        ('mesh.data=8', 'mesh.expert=1', 'mesh.sequence=1', 'data.batch_size=32'),
    ]


@pytest.mark.parametrize(
    'text, message',
    [
        ('mesh=4y2', "got mesh='4y2', wanted sizes of data x expert x sequence x tensor"),
        ('mesh=1x1x1x1x1', 'wanted sizes of'),
        ('data.batch_size', "got 'data.batch_size', wanted path=value,value"),
        ('mesh=4x2;', "got '', wanted"),
        ('mesh=4x2,', 'wanted path=value,value'),
    ],
)
def test_a_sweep_that_is_not_written_so_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        sweep.points(text)


def test_a_point_is_compiled_in_a_process_of_its_own(monkeypatch):
    """The child leaves a report, or its error is the row."""
    seen = []

    def run(command, **_):
        seen.append(command)
        result = command[-1].removeprefix('--json=')
        if '--set=mesh.data=2' in command:
            with open(result, 'w') as f:
                json.dump({'error': None, 'mfu': 0.5}, f)
            return types.SimpleNamespace(returncode=0, stderr='')
        return types.SimpleNamespace(returncode=1, stderr='warning\nerror: mesh: no\n')

    monkeypatch.setattr(sweep.subprocess, 'run', run)
    rows = list(sweep.run(['script', '--job=train'], [('mesh.data=2',), ('mesh.data=3',)]))
    assert rows == [
        {'error': None, 'mfu': 0.5, 'settings': ['mesh.data=2']},
        {'error': 'error: mesh: no', 'settings': ['mesh.data=3']},
    ]
    assert seen[0][:3] == ['script', '--job=train', '--set=mesh.data=2']
