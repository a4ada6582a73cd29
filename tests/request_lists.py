"""Requests that are taken and requests that are refused, the public verifier's among them.

Each is what a body has beside `messages`, which it may have too.
"""

HELLO = {'role': 'user', 'content': 'hi'}
CALLED = {
    'role': 'assistant',
    'content': None,
    'tool_calls': [
        {'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"x": 1}'}}
    ],
}
RESULT = {'role': 'tool', 'tool_call_id': 'a', 'content': 'ok'}


def tool(name='f', **fields):
    return {'type': 'function', 'function': {'name': name} | fields}


def schema(**fields):
    return {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': {}} | fields}


def system(**fields):
    return {'messages': [{'role': 'system'} | fields, HELLO]}


# The public verifier's lists, by the rule that each belongs to.
TAKEN = [
    *({'temperature': value} for value in (0, 0.6, 1.0, 1)),
    *({'top_p': value} for value in (0.95, 1.0)),
    {'presence_penalty': 0, 'frequency_penalty': 0, 'n': 1},
    {'tool_choice': 'none'},
    {'tool_choice': 'auto'},
    {'tool_choice': 'auto', 'tools': []},
    {'tools': [tool()], 'tool_choice': 'required'},
    {'tools': [tool(parameters={'type': 'object'}, strict=True, description='d')]},
    {'tools': [tool('a' * 256)]},
    {'response_format': {'type': 'text'}},
    {'response_format': {'type': 'json_object'}},
    {'response_format': schema()},
    {'response_format': schema(strict=False)},
    *({'reasoning_effort': value} for value in ('low', 'high', 'max', 'none')),
    {'thinking': {'type': 'enabled', 'keep': 'all', 'effort': 'low'}},
    {'chat_template_kwargs': {'thinking': False, 'preserve_thinking': True}},
    {'stop': 'x'},
    {'stop': ['x'] * 5},
    {'prompt_cache_key': 'k', 'user': 'u', 'metadata': {}},
    {'max_tokens': 1024, 'max_completion_tokens': 7},
    {'stream': True, 'stream_options': {'include_usage': True}},
    {'messages': [{'role': 'system', 'tools': [tool()]}, HELLO], 'tool_choice': 'required'},
    {'messages': [{'role': 'system', 'tools': [tool()], 'content': ''}, HELLO]},
    {'messages': [HELLO, CALLED, RESULT]},
    {'messages': [HELLO, {'role': 'assistant', 'content': 'x', 'partial': True}]},
    {'messages': [HELLO, {'role': 'assistant', 'reasoning_content': 'x'}, HELLO]},
    {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'x'}]}]},
    {'temperature': None, 'tools': None, 'stop': None},
]


REFUSED = [
    ({'temperature': -0.1}, 'temperature'),
    ({'temperature': '1'}, 'temperature'),
    ({'temperature': True}, 'temperature'),
    ({'top_p': 1.1}, 'top_p'),
    ({'top_p': 0}, 'top_p'),
    ({'n': 2}, 'n: got 2'),
    ({'n': 0}, 'n: got 0'),
    ({'max_tokens': 0}, 'max_tokens'),
    ({'max_completion_tokens': 1.5}, 'max_completion_tokens'),
    ({'seed': 'x'}, 'seed'),
    ({'stop': ['x'] * 17}, 'stop'),
    ({'stop': ['']}, 'stop'),
    ({'stop': [1]}, 'stop'),
    ({'stream': 'yes'}, 'stream'),
    ({'stream_options': {}}, 'only with stream'),
    ({'messages': []}, 'messages'),
    ({'messages': 'x'}, 'messages'),
    ({'messages': [None]}, r'messages\[0\]'),
    ({'messages': [{'role': 'robot', 'content': 'x'}]}, 'role'),
    ({'messages': [{'role': ['user'], 'content': 'x'}]}, 'role'),
    ({'messages': [{'content': 'x'}]}, 'role'),
    ({'messages': [{'role': 'user'}]}, 'content'),
    ({'messages': [{'role': 'user', 'content': 5}]}, 'content'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'video_url'}]}]}, 'type'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'text'}]}]}, 'text'),
    ({'messages': [HELLO | {'nmae': 'x'}]}, 'did you mean name'),
    ({'messages': [HELLO | {'tools': [tool()]}]}, 'only a system message'),
    ({'messages': [HELLO | {'tools': []}]}, 'only a system message'),
    ({'messages': [HELLO, CALLED | {'tools': [tool()]}, RESULT]}, 'only a system message'),
    ({'messages': [{'role': 'assistant', 'content': 'x', 'partial': True}, HELLO]}, 'partial'),
    ({'messages': [HELLO, CALLED | {'partial': True}]}, 'partial'),
    (system(content='x', tools=[tool()]), 'content'),
    (system(tools=[{'function': {'name': 'f'}}]), 'type'),
    (system(tools=[{'type': 'function'}]), 'function'),
    (system(tools=[{'type': 'function', 'function': {}}]), 'name'),
    (system(tools=None), 'content'),
    ({'tools': {}}, 'tools'),
    ({'tools': [None]}, r'tools\[0\]'),
    ({'tools': [tool(), {'type': 'retrieval'}]}, r'tools\[1\].type'),
    ({'tools': [{'type': 'builtin_function', 'function': {'name': 'x'}}]}, 'type'),
    *(({'tools': [tool(name)]}, 'name') for name in ('', '1f', 'a@b', 'a' * 257, 'a b', 'f\n')),
    ({'tools': [tool(7)]}, 'name'),
    ({'tools': [tool(parameters=[])]}, 'parameters'),
    ({'tools': [tool(strict='yes')]}, 'strict'),
    ({'tools': [tool(), tool()]}, 'two named "f"'),
    ({'tools': [tool()]} | system(tools=[tool()]), 'two named'),
    (system(tools=[tool(), tool()]), 'two named'),
    (
        {'messages': [{'role': 'system', 'tools': [tool()]}] * 2 + [HELLO]},
        'two named',
    ),
    ({'messages': [HELLO, CALLED, {'role': 'tool', 'content': 'x'}]}, 'tool_call_id'),
    ({'messages': [HELLO, CALLED, RESULT | {'tool_call_id': ''}]}, 'tool_call_id'),
    ({'tool_choice': 'required'}, 'without tools'),
    ({'tool_choice': 'required', 'tools': []}, 'without tools'),
    ({'tool_choice': 'bogus', 'tools': [tool()]}, 'tool_choice'),
    ({'tool_choice': 7}, 'tool_choice'),
    ({'response_format': 'json'}, 'response_format'),
    ({'response_format': {}}, 'response_format.type'),
    ({'response_format': {'type': 'bogus'}}, 'response_format.type'),
    ({'response_format': {'type': 'json_schema'}}, 'json_schema'),
    ({'response_format': {'type': 'json_schema', 'json_schema': {'schema': {}}}}, 'name'),
    ({'response_format': schema(name='')}, 'name'),
    ({'response_format': schema(schema=None)}, 'schema'),
    ({'response_format': schema(schema='x')}, 'schema'),
    ({'response_format': schema(strict='true')}, 'strict'),
    ({'response_format': schema(strict=1)}, 'strict'),
    (
        {
            'response_format': {'type': 'json_object'},
            'messages': [HELLO, {'role': 'assistant', 'content': '{', 'partial': True}],
        },
        'partial',
    ),
    ({'logit_bias': {'5': 1}}, 'logit_bias'),
    ({'top_logprobs': 3}, 'logprobs'),
    ({'logprobs': True, 'top_logprobs': 21}, 'top_logprobs'),
    ({'temprature': 1}, 'did you mean temperature'),
    ({'thinking': {'type': 'maybe'}}, 'thinking.type'),
    ({'thinking': True}, 'thinking'),
]


# Taken by the open rules, refused by the hosted ones.
ONLY_OPEN = [
    {'temperature': 1.1},
    {'temperature': 2.0},
    {'top_p': 0.8},
    {'presence_penalty': 0.5},
    {'frequency_penalty': -2},
    {'top_k': 5},
    {'min_p': 0.1},
    {'repetition_penalty': 1.1},
    {'stop': ['x'] * 6},
    {'stop': 'x' * 33},
]
