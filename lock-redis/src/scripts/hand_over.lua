local released = let_go(OWNER)
if not life then
    return { released, 'late', stamp }
end
local answer, value = take(ARGV[4], life, ARGV[7], ARGV[8], ARGV[9])
return { released, unpack(answer or busy(value, life)) }
