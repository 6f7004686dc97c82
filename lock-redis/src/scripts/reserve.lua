-- ARGV: 4 the token of the grant, or '' for any, 5 for how many ms the name is reserved from now on, 6 server time in ms
-- when the request is too late, 7 '1' to end the hold.
-- While a name is reserved its lock is stored: only a release by its owner and a forced release end it or shorten its time.
local value = held()
if owner_of(value) ~= OWNER or ARGV[4] ~= '' and token_of(value) ~= ARGV[4] then
    if not value then
        -- As for a renewal: a replica refuses this.
        redis.call('DEL', LOCK)
    end
    return { 'lost', stamp }
end
if now > tonumber(ARGV[6]) then
    return { 'late', stamp }
end
local ends = ARGV[7] == '1'
if ends or redis.call('PTTL', LOCK) < tonumber(ARGV[5]) then
    redis.call('PEXPIRE', LOCK, ARGV[5])
end
if not ends then
    return { 'renewed', stamp }
end
-- After a write that needs no memory, so that a full server does not refuse this one.
redis.call('SET', LOCK, (string.gsub(value, ' ', ' ' .. RESERVED, 1)), 'PX', ARGV[5])
-- Whatever is wrong with the other keys, the hold has ended.
pcall(tell_first, tonumber(ARGV[5]))
return { 'released', stamp }
