-- ARGV: 4 a stamp: if the node has its data since then, it may grant at once.
local state, age, since, nodes, max_ttl = born()
local differs = disagreement(nodes, max_ttl)
if differs then
    return differs
end
if state == 'new' and since == ARGV[4] then
    state = 'open'
    set_born(state, since, nodes, max_ttl)
end
return { state, stamp, math.floor(age), since }
