-- Stands for itself. KEYS: the mark. ARGV: the token, then the command to carry out, if any.
if not string.match(ARGV[1], '^%d+$') then
    error('fencelock: not a token')
end
local mark = redis.call('GET', KEYS[1])
if mark and not string.match(mark, '^%d+$') then
    error('fencelock: foreign value in ' .. KEYS[1])
end
if mark and tonumber(ARGV[1]) < tonumber(mark) then
    return { 'stale', mark }
end
if mark ~= ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[1])
end
if #ARGV == 1 then
    return { 'admitted', 'OK' }
end
return { 'admitted', redis.call(unpack(ARGV, 2)) }
