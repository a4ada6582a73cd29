"""A headless Chromium that a test drives through a pipe, by the browser's own protocol."""

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

# The browser takes commands from descriptor 3 and answers on 4.
_START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One open page."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._rest = to_browser, from_browser, b''
        self._ids = itertools.count(1)
        self._session = None
        target = self.send('Target.createTarget', url='about:blank')['targetId']
        attached = self.send('Target.attachToTarget', targetId=target, flatten=True)
        self._session = attached['sessionId']

    def send(self, method: str, **params):
        """The result of one command."""
        number = next(self._ids)
        command = {'id': number, 'method': method, 'params': params}
        if self._session is not None:
            command['sessionId'] = self._session
        os.write(self._to, json.dumps(command).encode() + b'\0')
        while True:
            message = self._next()
            if message.get('id') == number:
                assert 'error' not in message, message
                return message['result']

    def _next(self):
        while b'\0' not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 30)
            assert ready, 'the browser does not answer'
            self._rest += os.read(self._from, 2**16)
        message, self._rest = self._rest.split(b'\0', 1)
        return json.loads(message)

    def open(self, url: str) -> None:
        self.send('Page.navigate', url=url)
        self.wait_for('document.readyState === "complete" && location.href !== "about:blank"')

    def run(self, script: str):
        """The value of a JavaScript expression."""
        found = self.send('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in found, found
        return found['result'].get('value')

    def wait_for(self, script: str):
        """The value of an expression as soon as it is true."""
        deadline = time.monotonic() + 20
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.send('Input.insertText', text=text)

    def press_enter(self) -> None:
        key = {'key': 'Enter', 'code': 'Enter', 'windowsVirtualKeyCode': 13, 'text': '\r'}
        self.send('Input.dispatchKeyEvent', type='keyDown', **key)
        self.send('Input.dispatchKeyEvent', type='keyUp', **key)


@contextlib.contextmanager
def open_browser():
    """A page; the test that asks for it is skipped where there is no Chromium."""
    program = shutil.which('chromium')
    if program is None:
        pytest.skip('needs chromium on the path (Debian: apt-get install chromium)')
    (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ['--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage']
        options += ['--remote-debugging-pipe', f'--user-data-dir={profile}', '--no-first-run']
        process = subprocess.Popen(
            [sys.executable, '-c', _START, str(read), str(write), program, *options],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(20)
            os.close(to_browser)
            os.close(from_browser)
