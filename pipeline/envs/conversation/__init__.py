"""A conversation with a policy as token ids: what the engine drew is what is trained, never rendered again."""

from penstock.pipeline.envs.conversation.base import Template
from penstock.pipeline.envs.conversation.messages import TemplateRefused
from penstock.pipeline.envs.conversation.plain import PlainTemplate
from penstock.pipeline.envs.conversation.segments import Answer, Context, Conversation, Part, Segment
from penstock.pipeline.envs.conversation.template import ChatTemplate, template_of

__all__ = [
    "Answer",
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
