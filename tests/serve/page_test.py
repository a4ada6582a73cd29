"""The chat page in a real browser: it streams, shows thoughts and calls, stops, and says errors."""

import time

import pytest

from k3jax.serve.admission import Limits
from tests.browser import open_browser
from tests.scripted_engine import ScriptedEngine, ids_of, running

pytestmark = pytest.mark.browser

TOOL = '[{"type": "function", "function": {"name": "look"}}]'


def answer_of(request, tokenizer):
    prompt = tokenizer.decode(request.prompt_ids)
    if 'tool="look" index="1"<|sep|>42' in prompt:
        return 'It is «/think»«response»42«/response»«/message»¶'
    if '# Tools' in prompt:
        call = '«call tool="look" index="1"»«argument key="at" type="string"»x«/argument»«/call»'
        return f'Hm.«/think»«response»«/response»«tools»{call}«/tools»«/message»¶'
    if 'forever' in prompt:
        return 'so ' * 1000
    return 'Thought 1.«/think»«response»<b>Hello</b> 🚀«/response»«/message»¶'


@pytest.fixture(scope='module')
def served():
    engine = ScriptedEngine(lambda request: ids_of(answer_of(request, engine.tokenizer)))
    engine.delay_s = 0.002
    with running(engine, limits=Limits(drain_timeout_s=1.0)) as found:
        yield found


@pytest.fixture(scope='module')
def browser():
    with open_browser() as page:
        yield page


def ask(page, text):
    page.wait_for('!document.getElementById("send").hidden')
    page.run('document.getElementById("input").focus()')
    page.type(text)
    page.press_enter()


SHOWN = 'document.querySelector("#log article.assistant:last-child {}")?.textContent'


def test_the_page(served, browser):
    page, engine = browser, served.engine
    page.open(served.url)
    page.wait_for('document.getElementById("model").textContent === "tiny"')

    ask(page, 'Hi <i>there</i>')
    page.wait_for('document.querySelector("#log .note")?.textContent.endsWith("tokens")')
    assert page.run(SHOWN.format('details .text')) == 'Thought 1.'
    assert page.run(SHOWN.format('> .text')) == '<b>Hello</b> 🚀'
    assert page.run('document.querySelector("#log .user .text").textContent') == 'Hi <i>there</i>'
    assert page.run('document.querySelectorAll("#log b, #log i").length') == 0
    assert page.run('document.querySelector("details.thought").open') is False

    ask(page, 'go on forever')
    page.wait_for(f'({SHOWN.format("details .text")} ?? "").length > 30')
    assert engine.num_running == 1
    length = f'{SHOWN.format("details .text")}.length'
    first = page.run(length)
    assert page.wait_for(f'{length} > {first}')  # it streams
    page.run('document.getElementById("stop").click()')
    page.wait_for(f'{SHOWN.format(".note")} === "Stopped"')
    deadline = time.monotonic() + 10
    while engine.num_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    page.run('document.getElementById("clear").click()')
    page.run(f"document.getElementById('tools').value = '{TOOL}'")
    ask(page, 'What is it?')
    page.wait_for('document.querySelector("#log textarea") !== null')
    assert page.run(SHOWN.format('.call')) == 'look({"at": "x"})'
    page.run('document.querySelector("#log textarea").value = "42"')
    page.run('document.getElementById("send").click()')
    page.wait_for(f'{SHOWN.format("> .text")} === "42"')
    # The thought and the call went back with the result.
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert 'Hm.' in prompt and '<|open|>argument key="at" type="string"<|sep|>x' in prompt

    page.run('document.getElementById("tools").value = "[{}]"')
    ask(page, 'again')
    assert 'tools[0]' in page.wait_for(SHOWN.format('.error'))
