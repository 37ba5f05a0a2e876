"""Conversations with a policy as token ids: the generated ids are trained as they are, never rendered again."""

from penstock.pipeline.data.conversation.base import Template
from penstock.pipeline.data.conversation.messages import TemplateRefused
from penstock.pipeline.data.conversation.plain import PlainTemplate
from penstock.pipeline.data.conversation.segments import AssistantTurn, Context, Conversation, Part, Segment
from penstock.pipeline.data.conversation.template import ChatTemplate, template_of

__all__ = [
    "AssistantTurn",
    "ChatTemplate",
    "Context",
    "Conversation",
    "Part",
    "PlainTemplate",
    "Segment",
    "Template",
    "TemplateRefused",
    "template_of",
]
