"""A chat template is data of a model: it reaches neither Python's objects nor the messages that it is given."""

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from penstock.pipeline.data.model_files import compiled


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (''|attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__base__.__name__}'.format(messages) }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_code_in_a_template_is_not_executed(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises((SecurityError, UndefinedError, OverflowError, TypeError)):
        compiled(source).render(messages=messages)
    assert messages == [{"role": "user", "content": "Hi"}]
