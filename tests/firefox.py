"""Drive Debian's Firefox by its Marionette protocol: JSON with a length before it, over a socket.

Playwright drives only the Firefox that it patches and downloads itself.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""the key under which WebDriver names an element"""
PREFERENCES = {
    "marionette.port": 0,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
}


class Firefox:
    def __init__(self, program: str, profile: Path, seconds: float = 60) -> None:
        lines = [f'user_pref("{name}", {json.dumps(value)});\n' for name, value in PREFERENCES.items()]
        (profile / "user.js").write_text("".join(lines))
        command = [program, "--headless", "--marionette", "--profile", str(profile), "--no-remote"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.seconds, self.number = seconds, 0
        try:
            self.socket = self._connect(profile / "MarionetteActivePort")
            self._read()  # it says hello
            self.send("WebDriver:NewSession", {"capabilities": {}})
        except BaseException:
            self.process.kill()
            raise

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def send(self, name: str, parameters: dict[str, Any]) -> Any:
        self.number += 1
        body = json.dumps([0, self.number, name, parameters]).encode()
        self.socket.sendall(f"{len(body)}:".encode() + body)
        _, _, error, result = self._read()
        if error:
            raise RuntimeError(f"{name}: {error['message']}")
        return result.get("value") if isinstance(result, dict) and set(result) == {"value"} else result

    def goto(self, address: str) -> None:
        self.send("WebDriver:Navigate", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression"""
        parameters = {"script": f"return ({script})", "args": list(arguments), "newSandbox": False}
        return self.send("WebDriver:ExecuteScript", parameters)

    def until(self, script: str) -> Any:
        """Wait until an expression is true"""
        deadline = time.monotonic() + self.seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"not within {self.seconds:g} s: {script}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        self.send("WebDriver:ElementClick", {"id": self._element(selector)})

    def type(self, selector: str, text: str) -> None:
        """Type into a field, or give paths to a file input"""
        self.send("WebDriver:ElementSendKeys", {"id": self._element(selector), "text": text})

    def _element(self, selector: str) -> str:
        found = self.send("WebDriver:FindElement", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _connect(self, port_file: Path) -> socket.socket:
        deadline = time.monotonic() + self.seconds
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self.process.poll() is None, "Firefox ended"
            assert time.monotonic() < deadline, "Firefox did not start"
            time.sleep(0.1)
        return socket.create_connection(("127.0.0.1", int(port_file.read_text())), self.seconds)

    def _read(self) -> Any:
        digits = b""
        while not digits.endswith(b":"):
            digits += self.socket.recv(1) or self._gone()
        body = b""
        while len(body) < int(digits[:-1]):
            body += self.socket.recv(int(digits[:-1]) - len(body)) or self._gone()
        return json.loads(body)

    def _gone(self) -> bytes:
        raise RuntimeError("Firefox closed the connection")
