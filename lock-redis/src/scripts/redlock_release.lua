-- ARGV: 4 the client, 5 the number of its last attempt before this request.
local value = redis.call('GET', LOCK)
-- What a later attempt of the same claim was granted stays, however late this request arrives.
local client, attempt = string.match(value or '', '^%d+ %S+ %d+ %d+ ([^ #]+)#(%d+) ')
local is_later = client == ARGV[4] and tonumber(attempt) > tonumber(ARGV[5])
local released = owner_of(value) == OWNER and not is_later
if released then
    redis.call('DEL', LOCK)
end
return { released and 'released' or 'lost', stamp }
