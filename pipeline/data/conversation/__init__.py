"""Conversations with a policy as token ids: the generated ids are trained as they are, never rendered again."""

from penstock.pipeline.data.conversation.messages import Template, TemplateRefused
from penstock.pipeline.data.conversation.segments import AssistantTurn, Context, Conversation, Part, Segment
from penstock.pipeline.data.conversation.template import ChatTemplate, PlainTemplate, template_of

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
