# Names of locks that are held.
_fencelock_held() {
    local -a held
    held=(${(f)"$(timeout 2 fencelock ${opt_args[--url]:+--url} ${(Q)opt_args[--url]} list --names 2> /dev/null)"})
    compadd -a held
}

