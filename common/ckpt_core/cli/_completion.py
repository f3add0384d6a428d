"""`completion`: a script with which a shell completes commands, options and steps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Final

from ckpt_core.cli._outcome import Outcome

_BASH: Final = """\
# ckpt: eval "$(ckpt completion bash)"
_ckpt_options() {{
    case "$1" in
{cases}
    esac
}}
_ckpt_steps() {{
    local word
    for word in "${{COMP_WORDS[@]:2}}"; do
        [ -d "$word" ] && ls "$word" 2>/dev/null | sed -n 's/^step-0*\\([0-9][0-9]*\\).*/\\1/p'
    done
}}
_ckpt() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
    elif [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$(_ckpt_options "$command")" -- "$current"))
    elif [[ "$before" == --step || "$before" == --steps ]]; then
        COMPREPLY=($(compgen -W "$(_ckpt_steps)" -- "$current"))
    elif [ "$command" = completion ]; then
        COMPREPLY=($(compgen -W "bash zsh fish" -- "$current"))
    else
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _ckpt ckpt
"""
_ZSH: Final = """\
# ckpt: eval "$(ckpt completion zsh)"
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""
_FISH: Final = """\
# ckpt: ckpt completion fish | source
function __ckpt_steps
    for word in (commandline -opc)
        test -d $word; and ls $word 2>/dev/null | string replace -rf '^step-0*([0-9]+).*' '$1'
    end
end"""


def run(arguments: Namespace) -> Outcome:
    parsers: Mapping[str, ArgumentParser] = arguments.commands
    cases = "\n".join(f'        {name}) echo "{" ".join(_options(p))}" ;;' for name, p in parsers.items())
    bash = _BASH.format(cases=cases, commands=" ".join(parsers))
    script = {"fish": _fish(parsers), "zsh": _ZSH + bash, "bash": bash}[arguments.shell]
    return Outcome(fields={"shell": arguments.shell, "script": script}, parts=script.rstrip("\n").split("\n"))


def _options(parser: ArgumentParser) -> list[str]:
    return sorted(
        name
        for action in parser._actions  # argparse has no public list of them
        for name in action.option_strings
        if name.startswith("--")
    )


def _fish(parsers: Mapping[str, ArgumentParser]) -> str:
    lines = [_FISH]
    for name, parser in parsers.items():
        within = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c ckpt -n __fish_use_subcommand -a {name} -f")
        for option in _options(parser):
            steps = " -x -a '(__ckpt_steps)'" if option in {"--step", "--steps"} else ""
            lines.append(f"complete -c ckpt {within} -l {option.removeprefix('--')}{steps}")
    lines += [f"complete -c ckpt -n __fish_use_subcommand -l {option}" for option in ("help", "version")]
    lines.append("complete -c ckpt -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'")
    return "\n".join(lines) + "\n"
