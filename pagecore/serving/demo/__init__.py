"""The demo: a small model that chats through one paged cache, and the check of every token that it says."""

from pagecore.serving.demo.chat import demo
from pagecore.serving.demo.config import DemoConfig
from pagecore.serving.demo.report import DemoReport
from pagecore.serving.demo.traffic import Turn, chat_turns

__all__ = ["DemoConfig", "DemoReport", "Turn", "chat_turns", "demo"]
