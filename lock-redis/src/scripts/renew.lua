-- Needs the key of the exclusive lock alone, which can be read and written also while its slot is moved.
-- ARGV: 4 ttl in ms, 5 server time in ms when the request is too late, 6 '1' not to shorten what lasts longer, 7 the token of the grant,
-- or '' for any.
local value = redis.call('GET', LOCK)
if owner_of(value) == OWNER and (ARGV[7] == '' or token_of(value) == ARGV[7]) then
    if now > tonumber(ARGV[5]) then
        return { 'late', stamp }
    end
    if ARGV[6] ~= '1' or redis.call('PTTL', LOCK) < tonumber(ARGV[4]) then
        redis.call('PEXPIRE', LOCK, ARGV[4])
    end
    return { 'renewed', stamp }
end
if not value then
    -- Refused by a replica: what it lacks, its primary may have. Elsewhere there is nothing to delete.
    redis.call('DEL', LOCK)
end
return { 'lost', stamp }
