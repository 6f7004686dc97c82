-- ARGV: 3 ttl in ms.
local value = redis.call('GET', LOCK)
if owner_of(value) == OWNER then
    redis.call('PEXPIRE', LOCK, ARGV[3])
    return { 'renewed', text(now_us) }
end
if not value then
    pcall(grant_next)
end
return { 'lost', text(now_us) }
