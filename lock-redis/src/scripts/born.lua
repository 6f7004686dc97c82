-- ARGV: 4 a stamp: if the node has its data since then, it may grant at once.
local state, age, since = born()
if state == 'new' and since == ARGV[4] then
    state = 'open'
    redis.call('SET', BORN, state .. ' ' .. since)
end
return { state, stamp, math.floor(age), since }
