-- ARGV: 4 a stamp: if the node has its data since then, it may grant at once.
local state, age, since, differs = born()
if differs then
    return differs
end
if state == 'new' and since == ARGV[4] then
    state = 'open'
    set_born(state, since, NODES, MAX_TTL)
end
return { state, stamp, math.floor(age), since }
