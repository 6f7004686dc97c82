-- ARGV: 4 the token that the node has granted, 5 the token that the majority shall have.
-- A node that granted the claim anew since then has perhaps lost what it had granted before, so it does not count.
local value = redis.call('GET', LOCK)
local stored = owner_of(value) == OWNER and token_of(value)
if not stored or stored ~= ARGV[4] and stored ~= ARGV[5] then
    return { 'lost', stamp }
end
if tonumber(redis.call('GET', FENCE) or '0') < tonumber(ARGV[5]) then
    count(ARGV[5])
end
if stored ~= ARGV[5] then
    redis.call('SET', LOCK, (string.gsub(value, '^(%d+ %S+ )%d+', '%1' .. ARGV[5])), 'KEEPTTL')
end
return { 'confirmed', stamp }
