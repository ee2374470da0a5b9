"""The demo: a small model serves chats from one paged cache, and every generated token is verified."""

from pagecore.serving.demo.chat import demo
from pagecore.serving.demo.config import DemoConfig
from pagecore.serving.demo.report import DemoReport
from pagecore.serving.demo.traffic import Turn, chat_turns

__all__ = ["DemoConfig", "DemoReport", "Turn", "chat_turns", "demo"]
