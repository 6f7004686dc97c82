local value = held()
if not value then
    pcall(grant_next)
    return { 'free', stamp }
end
local lease = redis.call('PTTL', LOCK)
redis.call('DEL', LOCK)
local client = string.match(value, '^%d+ %S+ %d+ %d+ (%S+)')
if client then
    tell(client, 'taken', owner_of(value))
end
pcall(grant_next)
return { 'released', stamp, lease, value }
