"""The demo: a small model that chats through one paged cache, and the check of every token that it says."""

from pagecore.serving.demo.chat import DemoConfig, DemoReport, chat_requests, demo

__all__ = ["DemoConfig", "DemoReport", "chat_requests", "demo"]
