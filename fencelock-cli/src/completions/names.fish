
# Names of locks that are held, and the command of `fencelock run`.
complete -c fencelock -n "__fish_fencelock_using_subcommand run holder list release; and not contains -- -- (commandline -opc)" -f -a "(timeout 2 fencelock list --names 2>/dev/null)"
complete -c fencelock -n "__fish_fencelock_using_subcommand run; and contains -- -- (commandline -opc)" -f -a "(__fish_complete_subcommand --fcs-skip=(contains -i -- -- (commandline -opc)))"
