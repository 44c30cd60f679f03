# Renders chats by a model's Jinja template as transformers does: one JSON object a line in, one out.
#   first {"template", "bos_token", "eos_token", "max_bytes"}, answered by {}, {"missing"}: Python lacks that, or {"error"};
#   then the template's variables, {"messages", "add_generation_prompt", ..}, answered by {"text"}, {"bytes"}: it has
#   more than max_bytes, or {"error"}.
# The template is a stranger's: it runs in Jinja's sandbox, in a process that can do nothing but compute and
# has bounded memory; whoever started it bounds its time.
import json
import resource
import sys
from datetime import datetime

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
except ImportError:
    sys.stdin.readline()
    print('{"missing": "jinja2"}', flush=True)
    sys.exit()


class Refused(Exception):
    pass


class Generation(jinja2.ext.Extension):
    """{% generation %} stands around what the assistant says, for those who train; here it says nothing."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    def said(self, caller):
        return caller()


def refuse(message):
    raise Refused(str(message))


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(template):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def warm_up():
    """Everything that Python and Jinja load when they first need it: later nothing can be opened."""
    compiled("{% for m in messages %}{{ 'a\\n' + m.x | trim | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
             "{% generation %}x{% endgeneration %}"
             "{{ strftime_now('%Y') }}").render(messages=[{"x": "\u00e9"}])
    for wrong in ("{% if %}", "{{ raise_exception('x') }}", "{{ x.y.z }}", "{{ ''.__class__ }}"):
        try:
            compiled(wrong).render()
        except (Refused, jinja2.exceptions.TemplateError) as error:
            str(error)


def rendered(template, variables, max_bytes):
    text = template.render(**variables)
    size = len(text) if len(text) > max_bytes else len(text.encode("utf-8", "surrogatepass"))
    return {"text": text} if size <= max_bytes else {"bytes": size}


def main():
    warm_up()
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # those that are open
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    template, always, max_bytes = None, {}, 0
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if template is None:
                template = compiled(request["template"])
                max_bytes = request["max_bytes"]
                always = {"tools": None, "documents": None, **{key: request[key] for key in ("bos_token", "eos_token")}}
                answer({})
            else:
                answer(rendered(template, {**request, **always}, max_bytes))
        except (Refused, jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError, AttributeError,
                RecursionError, MemoryError, ArithmeticError, LookupError, OSError, ImportError) as error:
            answer({"error": f"{type(error).__name__}: {error}"[:1000]})


main()
