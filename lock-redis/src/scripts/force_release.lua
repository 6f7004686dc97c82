local function serve()
    local done, found = pcall(grant_next)
    return done and found == 'more' and 1 or 0
end

local value = held()
if not value then
    return { 'free', stamp, serve() }
end
local lease = redis.call('PTTL', LOCK)
redis.call('DEL', LOCK)
local client = string.match(value, '^%d+ %S+ %d+ %d+ (%S+)')
if client then
    tell(client, 'taken', owner_of(value))
end
return { 'released', stamp, serve(), lease, value }
