
# Names of locks that are held, and the command of `fencelock run`.
_fencelock_held() {
    local i place=() program=$1 cur=$2 name
    for (( i = 1; i < COMP_CWORD; i++ )); do
        # A word with a colon may come in parts.
        [[ ${COMP_WORDS[i]} == --url ]] && place=(--url "$(_fencelock_url $(( i + 1 )))")
    done
    while IFS= read -r name; do
        [[ $name == "$cur"* ]] && COMPREPLY+=("$(printf %q "$name")")
    done < <(timeout 2 "$program" "${place[@]}" list --names 2> /dev/null)
}

# The address that begins at that word.
_fencelock_url() {
    local i=$1 url=
    [[ ${COMP_WORDS[i]} == = ]] && (( i++ ))
    while [[ $i -lt $COMP_CWORD ]]; do
        url+=${COMP_WORDS[i]}
        [[ ${COMP_WORDS[i]} == : || ${COMP_WORDS[i]} == = || ${COMP_WORDS[i+1]} == : || ${COMP_WORDS[i+1]} == = ]] || break
        (( i++ ))
    done
    printf %s "$url"
}

_fencelock_with_names() {
    local i word command= names=0 dashes=0 skip=0
    for (( i = 1; i < COMP_CWORD; i++ )); do
        word=${COMP_WORDS[i]}
        if (( skip )); then
            skip=0
            # The parts of --url=sqlite:a.db, or of the address after --url.
            [[ $word == = ]] && skip=1
            continue
        fi
        case $word in
            --)
                dashes=$i
                [[ $command == run ]] && break
                ;;
            : | =) skip=1 ;;
            --url | --ttl | --wait | --timeout | -w | --grace | --label | -E | --conflict-exit-code) skip=1 ;;
            --max-hold | --max-holders | --min-hold | --at-least) skip=1 ;;
            -*) ;;
            *) if [[ -z $command ]]; then command=$word; else (( names++ )); fi ;;
        esac
    done
    if [[ $command == run ]] && (( dashes && (names || COMP_CWORD > dashes + 1) )); then
        # The name may come after the dashes, if it begins with one.
        if (( ! names )); then
            (( dashes++ ))
            [[ ${COMP_WORDS[dashes + 1]} == -- ]] && (( dashes++ ))
        fi
        if declare -F _comp_command_offset > /dev/null; then
            _comp_command_offset $(( dashes + 1 ))
        elif declare -F _command_offset > /dev/null; then
            _command_offset $(( dashes + 1 ))
        elif (( COMP_CWORD == dashes + 1 )); then
            COMPREPLY=($(compgen -c -- "$2"))
        else
            COMPREPLY=($(compgen -f -- "$2"))
        fi
        return
    fi
    case $command in
        run | holder | list | release)
            if (( ! skip && ! names )) && [[ $2 != -* || $dashes -gt 0 ]]; then
                COMPREPLY=()
                _fencelock_held "$1" "$2"
                return
            fi
            ;;
    esac
    _fencelock "$@"
}

complete -F _fencelock_with_names -o bashdefault -o default fencelock
